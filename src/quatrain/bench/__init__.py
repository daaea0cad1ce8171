"""What this machine gives: its limits, each kernel of a training step against them and beside torch, whole steps."""
