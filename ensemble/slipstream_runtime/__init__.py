"""How the processes of one server see each other: files that each maps, heartbeats, credits."""
