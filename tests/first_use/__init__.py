"""A first day with servekit, walked by a script in a terminal (tmux) and in Chromium.

    python -m tests.first_use -o FOLDER [--only commands,mistakes,pages]

It types what a new user types, opens every page, writes what it saw to FOLDER/report.md with the
screens and screenshots beside it, and ends with 1 where something was not as it should be. Somebody
has to look at the screenshots: a script cannot tell whether a page is pleasant.
"""
