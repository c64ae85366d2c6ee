#!/bin/sh
# Submit the courier's job, and submit it again whenever it fails: sh carry.sh JOB ADMIN, with the folder of the job and
# the startup kit of a user who may submit jobs. It ends when the run is over.
submit() { nvflare job submit --job-folder "$1" --startup-kit "$2" | sed -n 's/^job_id: //p'; }
until job=$(submit "$1" "$2") && [ "$job" ] && nvflare job wait --startup-kit "$2" "$job"; do sleep 5; done
