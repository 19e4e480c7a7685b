#!/usr/bin/env bash
# Creates .venv-clients, an environment of the client libraries that `make test-clients` runs against a server; run it
# through `make test-clients`. It is apart from .venv, because these libraries pin versions of their own. PYTHON chooses
# the interpreter, CLIENTS_VENV the folder.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=${CLIENTS_VENV:-.venv-clients}
source scripts/environment.sh
# Exact versions: a client's new release is tried on purpose, not found in a failing run. lm-eval's `hf` model, which it
# is compared with, needs torch.
packages=(
    anthropic==2.12.0
    'lm_eval[api,hf]==0.4.13'
    openai==3.52.0
    schemathesis==4.32.5
    torch==2.13.0
    transformers==5.23.0
)
# These ask for a newer certifi than package indexes have, so their requirements are installed without it.
without_certifi=(langchain-core==1.7.7 langchain-openai==1.7.4 litellm==1.109.1)

echo "Setting up client libraries in $(realpath -m "$venv") (some minutes, 2 GB on disk)"
create_environment
pip install --no-deps "${without_certifi[@]}"
requirements "${without_certifi[*]%%==*}" certifi >"$venv/requirements.txt"
pip install "${packages[@]}" --requirement "$venv/requirements.txt"
check_imports 'anthropic, langchain_openai, litellm, lm_eval, openai, schemathesis'
printf '%s\n' "${packages[@]}" "${without_certifi[@]}" >"$venv/packages.txt" # the target of `make test-clients`
echo "ready after $((SECONDS - started)) s"
