"""State that the processes of one server share: mapped files, heartbeats, credits."""
