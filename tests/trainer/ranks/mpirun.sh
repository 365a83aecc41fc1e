#!/bin/sh
# mpirun.sh RANKS PROGRAM [ARGS...]: runs a test with so many ranks on this machine, more than cores if
# need be; 77 (skipped) without an mpirun.
command -v mpirun >/dev/null || { echo "no mpirun here"; exit 77; }
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export GDN_RANK_TIMEOUT="${GDN_RANK_TIMEOUT:-100}"
ranks=$1
shift
exec mpirun -n "$ranks" --oversubscribe --bind-to none "$@"
