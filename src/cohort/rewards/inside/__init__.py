"""What runs inside the sandbox, under ``python -I -S``: these files import each other and the standard library only."""
