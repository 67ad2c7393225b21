"""Which TaskManagers are alive."""
