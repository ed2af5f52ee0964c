#!/bin/bash
#SBATCH -J nf-NFCORE_RNASEQ_ALIGN_STAR_STAR_ALIGN_(sample_1_REP1)
#SBATCH -o /scratch1/01234/ada/.command.log
#SBATCH --no-requeue
#SBATCH --signal B:USR2@30
#SBATCH -c 6
#SBATCH -t 01:00:00
#SBATCH --mem 36864M
#SBATCH -p short
NXF_CHDIR=/scratch1/01234/ada
### ---
### name: 'NFCORE_RNASEQ:ALIGN_STAR:STAR_ALIGN (sample_1_REP1)'
### container: 'biocontainers/star:2.7'
### ...
set -e
set -u
NXF_DEBUG=${NXF_DEBUG:=0}; [[ $NXF_DEBUG > 1 ]] && set -x
NXF_ENTRY=${1:-nxf_main}

on_exit() {
    local last_err=$?
    printf -- "$last_err" > "$NXF_CHDIR/.exitcode"
    exit $last_err
}
on_term() {
    exit 1
}
nxf_launch() {
    /bin/bash -ue -c 'sort -n numbers.txt > aligned.txt'
}
nxf_main() {
    trap on_exit EXIT
    trap on_term TERM INT USR2
    cd "$NXF_CHDIR"
    touch .command.begin
    nxf_launch
    echo finished
}
$NXF_ENTRY
