"""From what the user built to the job graph that is submitted."""

from penstock.planner.plan import PlannedJob, plan_job

__all__ = ["PlannedJob", "plan_job"]
