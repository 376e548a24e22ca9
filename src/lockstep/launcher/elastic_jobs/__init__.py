"""The launchers of an elastic job, of which each may have to lead it; jobs of fixed size load
nothing of this.

A host founds the job or joins it (`elastic_node`, `admission`), over connections of each host to
each (`mesh`, `peers`). Its loop (`elastic_host`) follows the election of the host that leads
(`election`, `claims`), and passes on what workers (`elastic_workers`, `local_members`) and users
(`user_requests`) say. Who leads (`leadership`, `other_hosts`) decides with the pure `elastic_job`;
the others keep what they are told (`host_knowledge`), and know when they wait in vain (`waiting`).
"""
