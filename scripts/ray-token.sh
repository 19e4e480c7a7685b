#!/usr/bin/env bash
# Makes the token of the Ray clusters that are started from this machine, unless it exists. Anyone who has the token can run
# code on every node, so only its owner may read it. `ray get-auth-token --generate` writes the same file, readable by all.
set -euo pipefail

file=${RAY_AUTH_TOKEN_PATH:-$HOME/.ray/auth_token}
umask 077
mkdir -p "$(dirname "$file")"
if [ ! -s "$file" ]; then
    head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \n' >"$file"
fi
chmod 600 "$file"
echo "Ray's token is in $file"
