#!/usr/bin/env bash
# Makes the secret files of the clusters that are started from this machine with `ray up`, unless they exist. Only their
# owner may read them.
#
#   ~/.ray/auth_token                the token that Ray's processes demand: who has it can run code on every node.
#                                    `ray get-auth-token --generate` writes the same file, readable by all.
#   ~/.config/tandem/api-keys        API keys of the server's clients (docs/api_keys.md); made with one operator's key,
#                                    which is printed once, on standard output: the file has its hash only
#   ~/.config/tandem/tenants.toml    the tenants' weights (docs/admission.md); made so that all tenants are alike
set -euo pipefail

umask 077
token=$HOME/.ray/auth_token
folder=$HOME/.config/tandem

random() { head -c "$1" /dev/urandom | od -An -v -tx1 | tr -d ' \n'; }
sha256() { if command -v sha256sum >/dev/null; then sha256sum; else shasum -a 256; fi | cut -d' ' -f1; }

# As `tandem keys create --operator` does it, which this machine need not have.
make_keys() {
  local key
  key=sk-$(random 32)
  printf '{"version": 1, "keys": [{"id": "k-%s", "sha256": "%s", "tenant": "*", "created": "%s"}]}\n' \
    "$(random 4)" "$(printf %s "$key" | sha256)" "$(date -u +%Y-%m-%dT%H:%M:%SZ)" >"$folder/api-keys"
  echo "The operator's API key, which is shown this once:" >&2
  echo "$key"
}

mkdir -p "$(dirname "$token")" "$folder"
[ -s "$token" ] || random 32 >"$token"
[ -s "$folder/api-keys" ] || make_keys
[ -s "$folder/tenants.toml" ] || echo "[default]" >"$folder/tenants.toml"
chmod 600 "$token" "$folder/api-keys" "$folder/tenants.toml"
echo "Ray's token is in $token, keys and tenants of the server in $folder" >&2
