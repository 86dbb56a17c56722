"""Installs, starts, watches, repairs and ends a tritonserver."""
