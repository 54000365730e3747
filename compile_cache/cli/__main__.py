"""`python -m compile_cache.cli`: the command where the library is a folder of an image and not installed."""

from compile_cache.cli import main

main()
