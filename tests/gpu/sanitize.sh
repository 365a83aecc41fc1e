#!/bin/sh
# sanitize.sh memcheck|racecheck BUILD [PROGRAM...]
# compute-sanitizer over the kernels on small shapes: accesses outside of what is allocated, and hazards in shared memory.
# By hand: a program is many times slower under it. racecheck needs a build of its own, where every lane arrives at the
# barriers (kernels/common/ptx_sm90.cuh):
#   meson setup build-racecheck -Dcuda_args=-DGDN_RACECHECK && ninja -C build-racecheck
# PROGRAM: some of trainer, gdn2, attention, experts, decoder, decode, front, rule, primitives; all if none is named.
# LIMIT in the environment: seconds a program may take.
# Ends with 0 when nothing was found, 1 when something was, 3 when nothing was but a program did not finish, 77 (skipped)
# without compute-sanitizer or a usable device.
tool=$1 build=$2
PATH=$PATH:${CUDA_HOME:-/usr/local/cuda}/bin
case $tool:$# in
memcheck:[2-9] | racecheck:[2-9] | memcheck:1[01] | racecheck:1[01]) shift 2 ;;
*) echo "usage: sanitize.sh memcheck|racecheck BUILD [trainer|gdn2|attention|experts|decoder|decode|front|rule|primitives]..."; exit 2 ;;
esac
command -v compute-sanitizer >/dev/null || { echo "no compute-sanitizer here"; exit 77; }
[ $# -gt 0 ] || set -- trainer gdn2 attention experts decoder decode front rule primitives

check() { # PROGRAM ARGUMENT...
  name=$1
  shift
  [ -x "$build/tests/gpu/$name" ] || { echo "no program $build/tests/gpu/$name"; exit 2; }
  echo "$tool $name $*"
  timeout "${LIMIT:-3600}" compute-sanitizer --tool "$tool" --error-exitcode 1 "$build/tests/gpu/$name" "$@"
  status=$?
  case $status in
  0) echo "$tool $name $*: nothing found" ;;
  77) skipped=1 ;;
  124) echo "$tool $name $*: not finished in ${LIMIT:-3600} s"; unfinished=1 ;;
  *) echo "$tool $name $*: status $status"; found=1 ;;
  esac
}

found=0 unfinished=0 skipped=0
for program in "$@"; do
  case $program in
  trainer) if [ "$tool" = memcheck ]; then check trainer_check ops; else check trainer_check ops native; fi ;;
  gdn2) check trainer_check ops "megatron, gdn2" ;;
  attention) check attention_check quick ;;
  experts) check experts_check quick ;;
  decoder) check decoder_check attention ;;
  decode) check gdn_decode_check ;;
  front) check gdn_front_check ;;
  rule) check gdn_rule_check quick ;;
  primitives) check primitives_check ;;
  *) echo "no program $program: trainer, gdn2, attention, experts, decoder, decode, front, rule or primitives"; exit 2 ;;
  esac
done
[ $found -eq 0 ] || exit 1
[ $skipped -eq 0 ] || exit 77
[ $unfinished -eq 0 ] || exit 3
