"""The JobMaster: the machine of one job, its messages, its shells and its views."""
