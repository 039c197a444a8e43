"""Tasks that several threads run at the same time."""

import threading
from collections.abc import Callable, Sequence


def run_together(tasks: Sequence[Callable[[], object]]) -> None:
    """Run all tasks at the same time, the last one in this thread."""
    barrier = threading.Barrier(len(tasks))

    def run(task: Callable[[], object]) -> None:
        barrier.wait()
        task()

    threads = [threading.Thread(target=run, args=(task,)) for task in tasks[:-1]]
    for thread in threads:
        thread.start()
    run(tasks[-1])
    for thread in threads:
        thread.join()
