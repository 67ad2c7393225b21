"""How state lies in a database of RocksDB, and how it is read from there; daemons and tools do."""
