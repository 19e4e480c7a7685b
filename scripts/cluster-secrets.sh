#!/usr/bin/env bash
# Makes the secret files of the clusters that are started from this machine with `ray up`, unless they exist. Only their
# owner may read them.
#
#   ~/.ray/auth_token                the token that Ray's processes demand: who has it can run code on every node.
#                                    `ray get-auth-token --generate` writes the same file, readable by all.
#   ~/.config/tandem/api-keys        keys of the server's clients, one a line (docs/admission.md); made with one key of
#                                    an operator
#   ~/.config/tandem/tenants.toml    the tenants' weights (docs/admission.md); made so that all tenants are alike
set -euo pipefail

umask 077
token=$HOME/.ray/auth_token
folder=$HOME/.config/tandem

random() { head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \n'; }

mkdir -p "$(dirname "$token")" "$folder"
[ -s "$token" ] || random >"$token"
[ -s "$folder/api-keys" ] || echo "sk-$(random) *" >"$folder/api-keys"
[ -s "$folder/tenants.toml" ] || echo "[default]" >"$folder/tenants.toml"
chmod 600 "$token" "$folder/api-keys" "$folder/tenants.toml"
echo "Ray's token is in $token, keys and tenants of the server in $folder"
