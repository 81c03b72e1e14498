#!/usr/bin/env bash
# A Slurm of two nodes on this host, for the tests: no systemd, no cgroups, no accounting, no GPUs.
#   tests/slurm/cluster.sh install        Debian's packages, where they are missing
#   tests/slurm/cluster.sh start FOLDER   prints the SLURM_CONF to export; all that it keeps is in FOLDER
#   tests/slurm/cluster.sh stop FOLDER
# Needs root.
set -euo pipefail

# A daemon that kept what the caller has open, such as a lock, would hold it for good. 255 is this script.
for descriptor in /proc/$$/fd/*; do
    number=${descriptor##*/}
    if ((number > 2 && number != 255)); then eval "exec $number>&-"; fi
done

install() {
    command -v slurmctld >/dev/null && command -v munged >/dev/null && return
    apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -yq --no-install-recommends slurm-wlm munge
}

# Jobs prove who they are through munge: one daemon for the host.
authenticate() {
    if munge -n 2>/dev/null | unmunge >/dev/null 2>&1; then return; fi
    local user=munge
    getent passwd $user >/dev/null || user=$(id -un)
    install_folder() { mkdir -p "$1" && chown "$user" "$1" && chmod "$2" "$1"; }
    install_folder /run/munge 755
    install_folder /var/log/munge 700
    install_folder /var/lib/munge 700
    install_folder /etc/munge 700
    if [[ ! -s /etc/munge/munge.key ]]; then
        (umask 077 && head -c 1024 /dev/urandom >/etc/munge/munge.key)
    fi
    chown "$user" /etc/munge/munge.key
    runuser -u "$user" -- munged
}

configure() {
    local folder=$1 port=$2 host
    host=$(hostname -s)
    mkdir -p "$folder"/{state,spool/left,spool/right}
    cat >"$folder/slurm.conf" <<CONF
ClusterName=tests
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$port
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool/%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdPidFile=$folder/slurmd-%n.pid
SlurmdLogFile=$folder/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0,sched_min_interval=0
SlurmdParameters=config_overrides
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobRequeue=1
KillWait=1
MinJobAge=900
ReturnToService=2
NodeName=left NodeHostname=$host NodeAddr=127.0.0.1 Port=$((port + 1)) CPUs=8 State=UNKNOWN
NodeName=right NodeHostname=$host NodeAddr=127.0.0.1 Port=$((port + 2)) CPUs=8 State=UNKNOWN
PartitionName=tests Nodes=left,right Default=YES State=UP
CONF
}

start() {
    local folder=$1 port
    port=$((10000 + RANDOM % 5000 * 4)) # below the ports that the kernel gives to other programs
    configure "$folder" "$port"
    export SLURM_CONF=$folder/slurm.conf
    authenticate
    slurmctld
    for node in left right; do slurmd -N $node; done
    for _ in $(seq 300); do
        [[ $(sinfo --noheader --format=%T 2>/dev/null | sort -u) == idle ]] && break
        sleep 0.2
    done
    sinfo --Node --format="%N %T %G" >&2
    echo "$SLURM_CONF"
}

stop() {
    local folder=$1 file
    export SLURM_CONF=$folder/slurm.conf
    scancel --user="$(id -un)" 2>/dev/null || true
    for _ in $(seq 75); do # what a job started ends with it, and only while the daemons live
        [[ -n $(squeue --noheader 2>/dev/null) ]] || break
        sleep 0.2
    done
    local pids=() pid
    for file in "$folder"/*.pid; do
        [[ -s $file ]] && pids+=("$(cat "$file")")
    done
    [[ ${#pids[@]} -gt 0 ]] || return 0
    kill "${pids[@]}" 2>/dev/null || true
    for _ in $(seq 50); do
        kill -0 "${pids[@]}" 2>/dev/null || return 0
        sleep 0.1
    done
    for pid in "${pids[@]}"; do kill -9 "$pid" 2>/dev/null || true; done # a slurmd waits for the last of its jobs
}

case ${1:-} in
    install) install ;;
    start | stop) "$1" "$(mkdir -p "$2" && cd "$2" && pwd)" ;;
    *) sed -n '2,6s/^# *//p' "$0" && exit 2 ;;
esac
