#!/usr/bin/env bash
# Creates .venv with everything Tandem needs, at the versions in constraints.txt. Run it through `make`, which skips it
# when nothing has changed. PYTHON chooses the interpreter, TANDEM_EXTRAS the extras; the full log is .venv/setup.log.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=.venv
log=$venv/setup.log
nixl_version=1.5.1
started=$SECONDS

say() { printf '  %s\n' "$*"; }

die() {
    printf '\nerror: %s\n' "$1" >&2
    shift
    for line in "$@"; do printf '       %s\n' "$line" >&2; done
    exit 1
}

interrupted() {
    printf '\n  interrupted; run make again\n' >&2
    exit 130
}
trap interrupted INT

find_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3 python3.13 python3.12 python3.11; do
        [ -n "$candidate" ] && command -v "$candidate" >/dev/null || continue
        "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue
        command -v "$candidate"
        return
    done
    return 1
}

# Runs pip with its output in the log and the current package on one line of the terminal.
pip() {
    local line status=0
    printf '\n$ pip %s\n' "$*" >>"$log"
    if [ -t 1 ]; then
        "$venv/bin/python" -m pip --disable-pip-version-check "$@" 2>&1 | while IFS= read -r line; do
            printf '%s\n' "$line" >>"$log"
            case $line in
                *Collecting* | *Downloading* | *Building* | *Installing*) printf '\r\033[K    %.100s' "$line" ;;
            esac
        done || status=$?
        printf '\r\033[K'
    else
        "$venv/bin/python" -m pip --disable-pip-version-check "$@" >>"$log" 2>&1 || status=$?
    fi
    [ "$status" -eq 0 ] && return
    [ "$status" -ne 130 ] || interrupted # Ctrl-C reached pip first
    grep -i 'error' "$log" | tail -n 5 >&2 || true
    die "pip $1 failed (exit code $status)" "the whole log: $log"
}

# The default build of torch for Linux is the CUDA build: gigabytes that are useless on a machine without a GPU.
check_torch_build() {
    command -v nvidia-smi >/dev/null && nvidia-smi >/dev/null 2>&1 && return
    [ -n "${TANDEM_ALLOW_CUDA:-}" ] && return
    local torch status=0
    torch=$(grep '^torch==' constraints.txt)
    "$venv/bin/python" scripts/check_torch_build.py "$torch" 2>>"$log" || status=$?
    case $status in
        0) ;;
        3) die "pip would install the CUDA build of $torch (several GB), but this machine has no NVIDIA GPU" \
            "point pip at the CPU build: set PIP_EXTRA_INDEX_URL to the CPU index named on PyTorch's install page," \
            "or PIP_FIND_LINKS to a folder with the CPU wheel, and run this again" \
            "(to install the CUDA build anyway: TANDEM_ALLOW_CUDA=1)" ;;
        *) die "pip finds no $torch for this Python" "the whole log: $log" ;;
    esac
}

echo "Setting up Tandem in $PWD/$venv"
bash scripts/debian-packages.sh

python=$(find_python) || die "no Python 3.11 or newer found" \
    "install one (Debian 12, Ubuntu 24.04: apt-get install python3 python3-venv) or name it: make PYTHON=/path/to/python3"
is_whole() {
    "$venv/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' && "$venv/bin/python" -m pip --version
}
if ! is_whole >/dev/null 2>&1; then
    rm -rf "$venv" # its interpreter is gone or too old, or its making was interrupted before it had pip
    problem=$("$python" -m venv "$venv" 2>&1) || die "$python cannot create a virtual environment: ${problem##*$'\n'}" \
        "install its venv module (Debian: python3-venv)"
fi
: >"$log"
say "[1/4] $("$venv/bin/python" --version) environment"

pip install $(grep -E '^(pip|setuptools)==' constraints.txt)
check_torch_build
say "[2/4] installer ready; torch will be the right build for this machine"

say "[3/4] packages (a minute or two, 2 GB on disk) ..."
# --no-build-isolation: the build uses the pinned setuptools from above and downloads nothing else.
pip install --no-build-isolation --constraint constraints.txt --editable ".[${TANDEM_EXTRAS:-worker,loadtest,report,dev}]"

# The `nixl` distribution requires both of its CUDA builds; one is enough, and it also runs without CUDA.
if [ "$(uname -s)" = Linux ]; then
    pip install --no-deps "nixl==$nixl_version" "nixl-cu13==$nixl_version"
    say "[4/4] NIXL $nixl_version"
else
    say "[4/4] NIXL exists for Linux only: use 'tandem serve --colocated' here"
fi
say "ready after $((SECONDS - started)) s"
