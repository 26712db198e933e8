from cluster.chaos.footprint import amounts, rows_known

METRICS = """# HELP pronghorn:held things held, by kind of the ledger
pronghorn:block_index_bytes{model_name="a",role="orchestrator"} 1024.0
pronghorn:block_index_bytes{model_name="b",role="orchestrator"} 2048.0
pronghorn:block_index_entries{model_name="a",role="orchestrator"} 30.0
pronghorn:block_index_entries{model_name="b",role="orchestrator"} 12.0
pronghorn:held{kind="blocks",model_name="a",role="decode"} 7.0
pronghorn:held{model_name="a",role="decode",kind="task"} 5.0
pronghorn:num_free_blocks{model_name="a",role="decode"} 9.0
"""


def test_a_process_tells_its_tasks_and_its_index_of_all_its_models() -> None:
    assert amounts(METRICS) == {"index KiB": 3.0, "tasks": 5.0}
    assert rows_known(METRICS) == [42.0]


def test_who_has_neither_tells_nothing() -> None:
    assert amounts("") == {}
    assert rows_known("") == []
