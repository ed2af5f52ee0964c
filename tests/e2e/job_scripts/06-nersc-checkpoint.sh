#!/bin/bash
#SBATCH -J ckpt
#SBATCH -q flex
#SBATCH -C cpu
#SBATCH -N 1
#SBATCH --time=01:00:00
#SBATCH --time-min=00:01:00
#SBATCH --comment=48:00:00
#SBATCH --signal=B:USR1@3599
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH -o %x-%j.out
#SBATCH -e %x-%j.err

state=/global/cfs/cdirs/m1234/ckpt.state
save() {
    echo "saving" > "$state"
}
trap 'save; reached=yes' USR1

# The work goes on until the signal arrives.
while [ -z "${reached:-}" ]; do
    sleep 0.1
done
test -s "$state"
echo finished
