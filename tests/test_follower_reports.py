"""What a follower tells its leader, and that nothing it must tell is lost."""

from pathway.dataflow.layout import Aval, Layout, Sharding
from pathway.executor.follower import FollowerCore
from pathway.executor.gangs import Put, SendToLeader
from pathway.transport.messages import BufferArrived, PutOnIsland


def test_a_put_is_reported_though_it_is_the_first_of_its_session() -> None:
    follower = FollowerCore()
    layout = Layout(Aval((4,), "float32"), Sharding((("data", 4),), ((),)), (0, 1, 2, 3))
    put = PutOnIsland(session=7, buffer=1, layout=layout)
    assert follower.handle(put, 0.0) == [Put(put)]
    arrived = BufferArrived(session=7, buffer=1)
    assert follower.handle(arrived, 0.0) == [SendToLeader(arrived)]
