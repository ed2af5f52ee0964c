"""A job's script: its supervisor, its record, its step."""

from cluster.agent.scripts.record import StepRecord, recorded_jobs, remove_record
from cluster.agent.scripts.step import Step
