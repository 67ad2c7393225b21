"""The JobMaster: the machine of one job, its shells and its views."""
