"""Break a running instance on purpose and check what it promises; `servekit chaos` and the tests.

An operator's tool, beside `cli`: it speaks HTTP like any client, asks the control socket like
`servekit ps`, and hurts processes by signals like anybody could.
"""
