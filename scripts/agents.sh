#!/usr/bin/env bash
# Creates .venv-agents, a folder of the coding agents and agent libraries that `make test-clients` runs against a server;
# run it through `make test-clients`. Each part has its own versions: node/ (npm), aider/, litellm/ and python/ (PyPI).
# PYTHON chooses the interpreter, AGENTS_VENV the folder.
#
# Not here, because their packages download a program from elsewhere when they are installed: crush.
set -euo pipefail
cd "$(dirname "$0")/.."

folder=${AGENTS_VENV:-.venv-agents}
# Exact versions: an agent's new release is tried on purpose, not found in a failing run.
node_packages=(
    @anthropic-ai/claude-code@2.1.332
    @continuedev/cli@1.5.47
    @mariozechner/pi-coding-agent@0.73.1
    @openai/codex@0.171.0
    @qwen-code/qwen-code@0.24.4
    cline@3.0.65
    opencode-ai@1.18.33
)
aider_packages=(aider-chat==0.86.2)
litellm_packages=(instructor==1.17.0 litellm==1.109.1) # instructor's jiter is older than the others take
python_packages=(
    'pydantic-ai-slim[anthropic,openai]==2.68.0'
    llm==0.36
    openai-agents==0.24.0
    'smolagents[openai]==1.26.0'
)

mkdir -p "$folder/node"
echo "Setting up agents in $(realpath -m "$folder") (some minutes, 3 GB on disk)"
for part in aider litellm python; do
    venv=$folder/$part
    source scripts/environment.sh
    create_environment
    packages="${part}_packages[@]"
    pip install "${!packages}"
done

command -v npm >/dev/null || die "npm is missing: install Node.js 20 or later"
[ -f "$folder/node/package.json" ] || echo '{"private": true}' >"$folder/node/package.json"
# Claude Code's and opencode's own scripts put their programs, which came in packages too, in their places.
npm install --prefix "$folder/node" --no-audit --no-fund --save-exact "${node_packages[@]}" \
    >"$folder/node/setup.log" 2>&1 || die "npm install failed; the whole log: $folder/node/setup.log"
printf '%s\n' "${node_packages[@]}" "${aider_packages[@]}" "${litellm_packages[@]}" "${python_packages[@]}" >"$folder/packages.txt"
echo "ready after $SECONDS s"
