"""pytest takes hooks and fixtures from a file of this name; they are in kernel_session.py, where mypy can see them."""

from kernel_session import kernel_run, pytest_addoption, pytest_configure, pytest_terminal_summary

__all__ = ["kernel_run", "pytest_addoption", "pytest_configure", "pytest_terminal_summary"]
