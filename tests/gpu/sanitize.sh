#!/bin/sh
# sanitize.sh memcheck GDNTRAIN
# sanitize.sh racecheck TRAINER_CHECK
# compute-sanitizer over every op and backward step of small models, stack native: accesses outside of what is allocated, and
# hazards in shared memory. By hand: a program is many times slower under it. racecheck needs a build of its own, where every
# lane arrives at the barriers (kernels/common/ptx_sm90.cuh):
#   meson setup build-racecheck -Dcuda_args=-DGDN_RACECHECK && ninja -C build-racecheck tests/gpu/trainer_check
# Ends with 0 when nothing was found, with 77 (skipped) without compute-sanitizer or a usable device.
tool=$1 program=$2
PATH=$PATH:${CUDA_HOME:-/usr/local/cuda}/bin
case $tool in
memcheck) set -- "$program" check --stack native --device cuda ;;
racecheck) set -- "$program" ops native ;;
*) echo "usage: sanitize.sh memcheck GDNTRAIN | racecheck TRAINER_CHECK"; exit 2 ;;
esac
[ -x "$program" ] || { echo "no program $program"; exit 2; }
command -v compute-sanitizer >/dev/null || { echo "no compute-sanitizer here"; exit 77; }
compute-sanitizer --tool "$tool" --error-exitcode 1 "$@"
status=$?
[ "$status" -ne 4 ] || exit 77 # gdntrain found no usable device
exit "$status"
