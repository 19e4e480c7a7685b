#!/usr/bin/env bash
# Runs `tandem serve` and starts it again if it was killed: its workers on a Ray cluster run on, and it finds them again.
# One that ended by itself stays ended, with its exit code: it would refuse its settings again.
# SIGTERM, SIGINT and SIGHUP end both: the server gets SIGTERM, and its exit code is ours. A second one is passed on too:
# then the server ends at once. While no server runs, the exit code is 0.
#
#   bash scripts/keep-serving.sh tandem serve --ray-address auto ...
set -euo pipefail
is_pausing=''
stop() {
  trap 'kill "$!" 2>/dev/null && is_asked=1 || true' TERM INT HUP
  kill "${!:-none}" 2>/dev/null || exit 0
  [ -z "$is_pausing" ] || exit 0
  is_asked=1
  while [ -n "$is_asked" ]; do # another signal interrupts `wait`
    is_asked='' status=0
    wait "$!" || status=$?
  done
  exit "$status"
}
trap stop TERM INT HUP
while true; do
  "$@" &
  status=0; wait "$!" || status=$?
  [ "$status" -gt 128 ] || exit "$status"
  echo "keep-serving: the server was ended by signal $((status - 128)) and is started again" >&2
  is_pausing=1 # one that is killed at each start does not keep the machine busy
  sleep 1 &
  wait "$!" || true
  is_pausing=''
done
