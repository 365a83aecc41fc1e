#!/bin/sh
# failing_rank.sh MPIRUN_SH PROGRAM: one rank that fails ends the other, which waits for it, with its exit
# status and its message; so does one that dies.
mpirun_sh=$1 program=$2
command -v mpirun >/dev/null || { echo "no mpirun here"; exit 77; }
start=$(date +%s)
out=$("$mpirun_sh" 2 "$program" rows 2>&1)
status=$?
[ "$status" -eq 3 ] || { echo "expected the failing rank's status 3, got $status: $out"; exit 1; }
echo "$out" | grep -q "rank [01]: layers.0.*routed rows arrive at the experts of rank" || { echo "the failing rank's message is missing: $out"; exit 1; }
out=$("$mpirun_sh" 2 "$program" document 2>&1)
status=$?
[ "$status" -eq 2 ] || { echo "expected the status 2 of an empty document, got $status: $out"; exit 1; }
echo "$out" | grep -q "rank 1: batch: sequence offsets must strictly increase: 30 after 30" || { echo "the message about the document is missing: $out"; exit 1; }
out=$("$mpirun_sh" 2 "$program" die 2>&1)
status=$?
[ "$status" -ne 0 ] || { echo "a lost peer ended with status 0: $out"; exit 1; }
seconds=$(($(date +%s) - start))
[ "$seconds" -lt 40 ] || { echo "it took $seconds s"; exit 1; }
