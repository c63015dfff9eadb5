"""The process that talks to Ray for the supervisor, and the code in Ray's actors.

Ray places workers and reports nodes; requests do not pass through it. Ray is imported only here, in
separate processes: its client takes much memory and threads, and may hang or die with the cluster,
which must not happen to the supervisor.

    driver            the client: requests and releases places (`protocol.control.ray_messages`)
    actor             the actor: starts a worker or a gateway on its node and reports on it
    actor_handle      the driver's side of one actor
    actor_supervisor  parent of the actor's process: ends it and its children with the actor
    namespace_lock    one instance per Ray namespace
    nodes             the list of nodes, and their checks of themselves
    node_probe        the check that runs on a node
    node_checks       nodes that cannot run a worker
    node_selection    choice of a node
    placement_groups  Ray's search for room for a worker
"""
