"""The RocksDB state backend; ``store`` is where it begins."""
