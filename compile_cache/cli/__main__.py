"""`python -m compile_cache.cli`: the command, for a library that is a folder in an image and not installed."""

from compile_cache.cli import main

main()
