"""Liveness at the daemon: what stands still, who is told, and what members may do meanwhile. Pure.

The daemon suspects and tells; the master confirms and evicts. Times are fields of limits.Limits.

    file            what is suspected, and why        within                           then
    stalls          lane: what is sent on it is not   lane_timeout                     its link is made anew
                    acknowledged
                    lane: its other end takes         lane_timeout, and the master     its link is made anew
                    nothing                           says that the end has no reason
    slow_ops        operation: not ended              slow_after, each heartbeat       the master (Waits), the client
                                                                                       and the log are told
    masters         master: no answer                 patience, longer each round      the next address is tried
    commit_lease    this daemon: no master may have   heartbeat_timeout and            members commit nothing more
                    heard it                          master_grace                     by themselves
    master_session  master: it is another one         at once                          it gets a Report, and hears
                                                                                       nothing else until it answers

Beside these: peer/core/links.py (a link is lost, or cannot be made within link_timeout: LinkDown), peer/trainer.py (a
training process is stopped or dead: each heartbeat says so) and peer/process_lock.py (daemons of this machine that
have ended: Hello says so).
"""
