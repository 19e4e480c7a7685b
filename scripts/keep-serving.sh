#!/usr/bin/env bash
# Runs `tandem serve` and starts it again if it was killed: its workers on a Ray cluster run on, and it finds them again.
# One that ended by itself stays ended, with its exit code: it would refuse its settings again. SIGTERM ends both.
#
#   bash scripts/keep-serving.sh tandem serve --ray-address auto ...
set -euo pipefail
trap 'trap "" TERM; kill "$!" || true; status=0; wait "$!" || status=$?; exit "$status"' TERM
while true; do
  "$@" &
  status=0; wait "$!" || status=$?
  [ "$status" -gt 128 ] || exit "$status"
  echo "keep-serving: the server was ended by signal $((status - 128)) and is started again" >&2
  sleep 1 # one that is killed at each start does not keep the machine busy
done
