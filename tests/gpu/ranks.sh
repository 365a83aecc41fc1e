#!/bin/sh
# ranks.sh MPIRUN_SH RANKS_CHECK: runs on two GPUs equal runs on one; a rank that fails, dies or stays silent ends the
# other with a message within seconds. 77 (skipped) without mpirun or two GPUs.
mpirun_sh=$1 check=$2
command -v mpirun >/dev/null || { echo "no mpirun here"; exit 77; }
"$check" >/dev/null 2>&1
[ $? -ne 77 ] || { "$check"; exit 77; }
"$mpirun_sh" 2 "$check" || exit 1

fails() { # fails HOW STATUS MESSAGE SECONDS
  start=$(date +%s)
  out=$(GDN_RANK_TIMEOUT=5 "$mpirun_sh" 2 "$check" "$1" 2>&1)
  status=$? seconds=$(($(date +%s) - start))
  { [ "$status" -ne 0 ] && { [ "$2" = any ] || [ "$status" -eq "$2" ]; }; } || { echo "$1: status $status, expected $2: $out"; exit 1; }
  echo "$out" | grep -q "$3" || { echo "$1: the message is missing: $out"; exit 1; }
  [ "$seconds" -lt "$4" ] || { echo "$1: it took $seconds s"; exit 1; }
  echo "$1: ended after $seconds s: $(echo "$out" | grep -m 1 "$3")"
}
fails rows 3 "routed rows arrive at the experts of rank" 30
fails die any "signal 9" 30
fails silent any "no answer of the other ranks within 5 s" 40
