"""Liveness at the master: who is suspected, what confirms it, what follows, and who comes back. Pure.

Each row says who may say what, and within which time: a field of limits.Limits. A beat is a heartbeat_interval.

    file            what is suspected, and why       confirmed by                         then
    presence        daemon: no word for 1.5 beats    none for heartbeat_timeout, and      evicted; before: back
                                                     half of all daemons are heard        with its next word
                    daemon: its connection broke     not back within return_grace and     evicted; before: back
                                                     8 round trips                        with the same session
                    daemon: its process lock is      a later daemon of its machine        evicted
                    free
                    member: does not report what     2 heartbeat_timeout, in which its    evicted
                    it has finished                  daemon is heard
    confirming      daemon: its connection broke,    a witness: nobody listens there;     evicted
                    and a link of it                 doubt_grace for other witnesses
    name_conflicts  daemon: another has its name     its eviction                         the other has the name
    trainers        training process: its daemon     that for heartbeat_timeout           evicted
                    sees it stopped or dead
                    training process: others have    call_timeout, in which no operation  evicted
                    called more                      that is open excuses it
    stragglers      member: late with a call that    the grace time                       zeros in its place
                    has a grace time
    link_faults     link: an end lost it             link_settle, and no end is dead      a new epoch
                    link: an end cannot make it      link_settle; where no other ring is  another ring; else one
                                                     possible, half a link_timeout        end is evicted
    blame           operation: a member says that    all members: nothing has moved for   links anew; after 2
                    it waits                         stall_timeout                        times given up
    operators       anybody                          an operator                          evicted, or asked to leave
"""
