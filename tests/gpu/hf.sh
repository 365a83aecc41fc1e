#!/bin/sh
# hf.sh GDNTRAIN: every checkpoint under GDN_HF_CASES in bf16 on a GPU, by both stacks: loss, logits, hidden states and gradients
# against what transformers computed. 77 (skipped) without the folder or a usable device.
gdntrain=$1 found=0
[ -d "$GDN_HF_CASES" ] || { echo "GDN_HF_CASES names no folder"; exit 77; }
for folder in "$GDN_HF_CASES"/*/; do
  [ -f "${folder}reference.safetensors" ] || continue
  found=$((found + 1))
  "$gdntrain" check --hf "$folder" --device "${GDN_DEVICE:-cuda}" --dtype bf16 --stack both
  status=$?
  [ "$status" -ne 4 ] || exit 77 # no usable device
  [ "$status" -eq 0 ] || { echo "$folder: status $status"; exit 1; }
done
[ "$found" -gt 0 ] || { echo "no checkpoint with reference results in $GDN_HF_CASES"; exit 1; }
echo "$found checkpoints agree with transformers"
