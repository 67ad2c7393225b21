"""Which JobManager leads: proposed by an election, decided by LEADER in the storage."""
