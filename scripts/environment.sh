# Sourced by the scripts that create an environment beside .venv. They set `venv`, its folder, before.
# PYTHON chooses the interpreter; the full log is setup.log in that folder.
log=$venv/setup.log
started=$SECONDS

die() {
    printf 'error: %s\n' "$1" >&2
    exit 1
}

create_environment() {
    # One whose making was interrupted has no pip.
    "$venv/bin/python" -m pip --version >/dev/null 2>&1 || "${PYTHON:-python3}" -m venv --clear "$venv" ||
        die "no environment could be made in $venv"
    : >"$log"
}

pip() {
    printf '\n$ pip %s\n' "$*" >>"$log"
    "$venv/bin/python" -m pip --disable-pip-version-check "$@" >>"$log" 2>&1 && return
    grep -i 'error' "$log" | tail -n 5 >&2 || true
    die "pip $1 failed; the whole log: $log"
}

check_imports() {
    "$venv/bin/python" -c "import $1" >>"$log" 2>&1 || die "$1 cannot be imported; the whole log: $log"
}

# Prints what these installed packages require, except what is left out: requirements "PACKAGES" "LEFT OUT"
requirements() {
    "$venv/bin/python" - "$1" "$2" <<'PYTHON'
import sys
from importlib.metadata import requires
from pip._vendor.packaging.requirements import Requirement

packages, left_out = (set(names.split()) for names in sys.argv[1:])
for package in sorted(packages):
    for requirement in map(Requirement, requires(package) or []):
        is_needed = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if is_needed and requirement.name not in packages | left_out:
            requirement.marker = None
            print(requirement)
PYTHON
}
