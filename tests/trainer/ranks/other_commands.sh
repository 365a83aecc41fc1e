#!/bin/sh
# other_commands.sh MPIRUN_SH GDNTRAIN CONFIG: commands that know no ranks say so once, and do nothing.
mpirun_sh=$1 gdntrain=$2 config=$3
command -v mpirun >/dev/null || { echo "no mpirun here"; exit 77; }
for command in check "sweep $config" "bench rule"; do
  out=$("$mpirun_sh" 2 "$gdntrain" $command 2>&1)
  status=$?
  [ "$status" -eq 2 ] || { echo "$command: expected status 2, got $status: $out"; exit 1; }
  said=$(echo "$out" | grep -c "gdntrain: error: gdntrain ${command%% *} runs on one rank, but 2 were started")
  [ "$said" -eq 1 ] || { echo "$command: said $said times: $out"; exit 1; }
done
