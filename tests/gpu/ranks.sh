#!/bin/sh
# ranks.sh MPIRUN_SH RANKS_CHECK GDNTRAIN CONFIG: runs on two GPUs equal runs on one; a rank that fails, dies or stays silent
# ends the other with a message within seconds; a run of CONFIG goes on from its checkpoint to the same losses, on two GPUs or
# one. 77 (skipped) without mpirun or two GPUs.
mpirun_sh=$1 check=$2 gdntrain=$3 config=$4
command -v mpirun >/dev/null || { echo "no mpirun here"; exit 77; }
"$check" >/dev/null 2>&1
[ $? -ne 77 ] || { "$check"; exit 77; }
"$mpirun_sh" 2 "$check" || exit 1

fails() { # fails HOW STATUS MESSAGE SECONDS
  start=$(date +%s)
  out=$("$mpirun_sh" 2 "$check" "$1" 2>&1)
  status=$? seconds=$(($(date +%s) - start))
  { [ "$status" -ne 0 ] && { [ "$2" = any ] || [ "$status" -eq "$2" ]; }; } || { echo "$1: status $status, expected $2: $out"; exit 1; }
  echo "$out" | grep -q "$3" || { echo "$1: the message is missing: $out"; exit 1; }
  [ "$seconds" -lt "$4" ] || { echo "$1: it took $seconds s"; exit 1; }
  echo "$1: ended after $seconds s: $(echo "$out" | grep -m 1 "$3")"
}
fails rows 3 "routed rows arrive at the experts of rank" 30
fails die any "signal 9" 30
(
  export GDN_RANK_TIMEOUT=5
  fails silent any "no answer of the other ranks within 5 s" 40
) || exit 1

folder=$(mktemp -d) || exit 1
trap 'rm -rf "$folder"' EXIT
two="expert_model_parallel_size=2 --set moe_imbalance=2" one="expert_model_parallel_size=1"
run() { # run RANKS OUTPUT LAYOUT [ARGS...]
  output=$2 ranks=$1 layout=$3
  shift 3
  set -- "$gdntrain" run "$config" --device ${GDN_DEVICE:-cuda} -o "$folder/$output" --set $layout "$@"
  if [ "$ranks" -gt 1 ]; then set -- "$mpirun_sh" "$ranks" "$@"; fi
  "$@" >"$folder/text" 2>&1 || { echo "checkpoints, $output: status $?"; cat "$folder/text"; exit 1; }
}
numbers() { # of steps 3 and 4: loss and gradient norm
  sed -n 's/.*"step": *\([34]\),.*"loss": *\([^,]*\),.*"gradient_norm": *\([^,]*\),.*/\1 \2 \3/p' "$folder/$1/log.jsonl"
}
run 2 whole "$two" --steps 4 --checkpoint-every 2
run 2 resumed "$two" --steps 4 --resume "$folder/whole/checkpoints/step_00000002"
run 1 alone "$one" --steps 4 --resume "$folder/whole/checkpoints/step_00000002" --checkpoint "$folder/alone/kept"
run 2 again "$two" --steps 5 --resume "$folder/alone/kept/step_00000004"
[ "$(numbers whole | wc -l)" -eq 2 ] || { echo "checkpoints: no steps 3 and 4"; cat "$folder/whole/log.jsonl"; exit 1; }
[ "$(numbers whole)" = "$(numbers resumed)" ] || { echo "checkpoints: $(numbers whole), resumed $(numbers resumed)"; exit 1; }
# On one GPU the loss is within 1e-3 and the norm within 2e-3 of it, as in ranks_check.
{ numbers whole; numbers alone; } | awk '
  function off(a, b) { return a > b ? a - b : b - a }
  $1 in loss { n++; if (off($2, loss[$1]) >= 1e-3 || off($3, norm[$1]) >= 2e-3 * norm[$1]) exit bad = 1; next }
  { loss[$1] = $2; norm[$1] = $3 }
  END { exit bad || n != 2 }' || { echo "checkpoints: $(numbers whole), on one GPU $(numbers alone)"; exit 1; }
echo "checkpoints: $(numbers whole | tr '\n' ' '), resumed the same, on one GPU $(numbers alone | tr '\n' ' ')"
