#!/bin/sh
# sanitize.sh memcheck|racecheck BUILD [PROGRAM...]
# compute-sanitizer over every kernel on small shapes: accesses outside of what is allocated, and hazards in shared memory.
# By hand: a program is many times slower under it. racecheck needs a build of its own, where every lane arrives at the
# barriers (kernels/common/ptx_sm90.cuh):
#   meson setup build-racecheck -Dcuda_args=-DGDN_RACECHECK && ninja -C build-racecheck
# PROGRAM: some of trainer, attention, experts, decoder, decode, front, rule; all if none is named. LIMIT in the
# environment: seconds a program may take.
# Ends with 0 when nothing was found, 1 when something was, 77 (skipped) without compute-sanitizer or a usable device.
tool=$1 build=$2
PATH=$PATH:${CUDA_HOME:-/usr/local/cuda}/bin
case $tool:$# in
memcheck:[2-9] | racecheck:[2-9]) shift 2 ;;
*) echo "usage: sanitize.sh memcheck|racecheck BUILD [trainer|attention|experts|decoder|decode|front|rule]..."; exit 2 ;;
esac
command -v compute-sanitizer >/dev/null || { echo "no compute-sanitizer here"; exit 77; }
[ $# -gt 0 ] || set -- trainer attention experts decoder decode front rule
found=0
for program in "$@"; do
  case $program in
  trainer) line="trainer_check ops native" ;;
  attention) line="attention_check quick" ;;
  experts) line="experts_check quick" ;;
  decoder) line="decoder_check attention" ;;
  decode) line=gdn_decode_check ;;
  front) line=gdn_front_check ;;
  rule) line=gdn_rule_check ;;
  *) echo "no program $program: trainer, attention, experts, decoder, decode, front or rule"; exit 2 ;;
  esac
  [ -x "$build/tests/gpu/${line%% *}" ] || { echo "no program $build/tests/gpu/${line%% *}"; exit 2; }
  echo "$tool $line"
  # shellcheck disable=SC2086 # a program and its arguments
  timeout "${LIMIT:-3600}" compute-sanitizer --tool "$tool" --error-exitcode 1 "$build/tests/gpu/"$line
  status=$?
  echo "$tool $line: status $status"
  [ $status -ne 77 ] || exit 77
  [ $status -eq 0 ] || found=1
done
exit $found
