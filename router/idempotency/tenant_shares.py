"""What each tenant holds of what all tenants share, and what it can give up for others. Pure."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Generic, TypeVar

Item = TypeVar("Item")


class TenantShares(Generic[Item]):
    def __init__(self) -> None:
        self.total = 0
        self._held: Counter[str] = Counter()
        self._items: dict[str, OrderedDict[bytes, Item]] = {}  # the least recently used first

    def take(self, tenant: str, amount: int) -> None:
        self.total += amount
        self._held[tenant] += amount

    def give_back(self, tenant: str, amount: int) -> None:
        self.total -= amount
        self._held[tenant] -= amount
        if not self._held[tenant]:
            del self._held[tenant]

    def offer(self, tenant: str, key: bytes, item: Item) -> None:
        """The item can be given up from now on, until `withdraw`."""
        self._items.setdefault(tenant, OrderedDict())[key] = item

    def use(self, tenant: str, key: bytes) -> None:
        """Makes an item that can be given up the most recently used one."""
        self._items[tenant].move_to_end(key)

    def withdraw(self, tenant: str, key: bytes) -> None:
        items = self._items.get(tenant)
        if items is not None and items.pop(key, None) is not None and not items:
            del self._items[tenant]

    def give_up(self, tenant: str) -> Item | None:
        """Withdraws an item so that `tenant` may hold more: the least recently used one of the tenant that holds most.
        None if `tenant` itself holds more than each that has one."""
        most = max(self._items, key=self._held.__getitem__, default=None)
        if most is None or self._held[most] < self._held[tenant]:
            return None
        key, item = next(iter(self._items[most].items()))
        self.withdraw(most, key)
        return item

    def clear(self) -> None:
        """Withdraws all items."""
        self._items.clear()
