"""What kernels have in common whose late rows are rows of their input."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from anabranch.operators.rows.canonical import canonical, canonical_table

Members = npt.NDArray[np.int32] | None  # the combined row of every row


class PunctualKernel(ABC):
    __slots__ = ()

    @abstractmethod
    def grouped(self, port: int, table: pa.Table) -> tuple[pa.Table, Members]:
        """See `operators.base.Punctual`."""

    def combine(self, port: int, table: pa.Table) -> pa.Table:
        return self.grouped(port, table)[0]

    def late_schema(self, *schemas: pa.Schema) -> pa.Schema:
        return canonical(schemas[0])

    def late_table(self, port: int, rows: pa.Table, schema: pa.Schema) -> pa.Table:
        return canonical_table(rows)
