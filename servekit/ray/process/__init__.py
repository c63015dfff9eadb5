"""The process that speaks to Ray for the supervisor, and what runs in Ray's actors.

Ray places workers and tells of nodes; no request goes through it. It is imported here only, in
processes of their own: its client takes some 90 MB and threads, and may hang or die with the
cluster, which is nothing that the supervisor may do.

    driver   the client: berths in, berths out (`wire.cluster`)
    shim     what an actor is: starts a worker or a gateway on its node and tells of it
    warden   between the two: a process and all that it starts end with their actor
    doors    where a gateway on a node listens
    nodes    which nodes there are; has them look at themselves
    scouts   which of them cannot run a worker
    placing  has Ray find room for one
    look     what a node finds of itself
"""
