from __future__ import annotations

import math
from collections.abc import Hashable

import numpy as np

from kv_transfer.eviction.base import EvictionPolicy, Node

__all__ = ["HitDensity"]

class HitDensity(EvictionPolicy):
    num_queues = 4
    def __init__(self, capacity, watch=4096, per=2, kappa=8.0, prior=10.0, every=128, bypass=True, ends=False, young=1, nc=4):
        self.num_queues=nc
        super().__init__(capacity)
        self.W=watch; self.per=per; self.kappa=kappa; self.prior=prior; self.every=every; self.bypass=bypass; self.ends=ends
        self._lookups=0
        self.edges=np.array([0]+[2**(i/per) for i in range(0,20*per)]+[2.0**21])
        self.m=len(self.edges)-1
        self.nc=self.num_queues
        self.hits=np.zeros((self.nc,self.m)); self.lost=np.zeros((self.nc,self.m))
        self.watch={}  # lookup -> class
        self.gkey={}   # lookup -> ghost key
        self.gof={}    # key -> lookup
        self.latest=None; self.touched=None
        self.cursor=None
        self.learn()
    def bucket(self,a):
        return 0 if a<1 else min(self.m-1,1+int(math.log2(a)*self.per))
    def _on_lookup(self, node):
        self._lookups+=1
        now=self._lookups
        self.touched=node; self.latest=node; self.cursor=None
        if now%self.every==0: self.learn()
        c=0
        if node is not None:
            self.reuse(node.run)
            if not node.num_children:
                node.run=now
                node.num_uses+=1
                self._reclass(node)
            node.rank=now
            c=node.queue
        self.watch[now]=c
        if len(self.watch)>self.W:
            t=next(iter(self.watch)); c=self.watch.pop(t); self.lost[c][self.bucket(now-t)]+=1
            self.dropghost(t)
    def dropghost(self,t):
        k=self.gkey.pop(t,None)
        if k is not None: del self.gof[k]
    def reuse(self,t):
        c=self.watch.pop(t,None)
        if c is not None and t!=self._lookups:
            self.hits[c][self.bucket(self._lookups-t)]+=1
            self.dropghost(t)
        elif c is not None: self.watch[t]=c
    def _reclass(self,node):
        q=min(self.nc-1,node.num_uses)
        if q!=node.queue: self._move(node,q)
    def _on_add(self,node):
        p=self._parent_of(node)
        t=self.gof.get(node.key)
        if t is not None: self.reuse(t)
        if p is not None:
            node.num_uses=p.num_uses+(1 if p is self.touched and p.num_children>1 else 0)
        node.queue=min(self.nc-1,node.num_uses)
        node.rank=node.run=self._lookups
        self.watch[self._lookups]=node.queue
        self.latest=node
    def _on_remove(self,node):
        t=node.run
        if t in self.watch:
            self.dropghost(t)
            k=node.key
            o=self.gof.get(k)
            if o is not None: del self.gkey[o]
            self.gkey[t]=k; self.gof[k]=t
        if node is self.latest: self.latest=self._parent_of(node)
        if node is self.cursor: self.cursor=None
    def _inherit(self,parent,child):
        if child.rank>=parent.rank:
            parent.rank=child.rank
            parent.num_uses=max(parent.num_uses,child.num_uses)
            self._reclass(parent)
            if self.cursor is None and parent.is_evictable: self.cursor=parent
    def score(self,x): return self.idx[x.queue][self.bucket(self._lookups-x.rank)]
    def _choose(self):
        c=self.cursor
        if c is not None and c.is_evictable: return c
        cand=[x for q in self._queues if (x:=q.peek()) is not None]
        if self.ends:
            best={}
            for x in self._nodes.values():
                if x.is_evictable and (x.queue not in best or best[x.queue].rank<x.rank): best[x.queue]=x
            cand+=best.values()
        l=self.latest
        if self.bypass and l is not None and l.is_evictable: cand.append(l)
        return min(cand,key=lambda x:(self.score(x),x.rank)) if cand else None
    def learn(s):
        e=s.edges; w=np.diff(e)
        cens=s.lost.copy()
        if s.watch:
            a=s._lookups-np.fromiter(s.watch,float,len(s.watch)); c=np.fromiter(s.watch.values(),int,len(s.watch))
            b=np.where(a<1,0,np.minimum(s.m-1,1+(np.log2(np.maximum(a,1))*s.per).astype(int)))
            np.add.at(cens,(c,b),1)
        ev=s.hits+cens
        risk=np.cumsum(ev[:,::-1],axis=1)[:,::-1]-cens*.5
        h0=np.full(s.m,.15/s.per)
        g=(s.hits.sum(0)+s.prior*h0)/(risk.sum(0)+s.prior)
        haz=np.clip((s.hits+s.kappa*g)/(risk+s.kappa),0,1)
        S=np.cumprod(np.concatenate([np.ones((s.nc,1)),1-haz],1),axis=1)
        p=S[:,:-1]-S[:,1:]; t=w*(S[:,:-1]+S[:,1:])/2
        idx=np.zeros((s.nc,s.m))
        for b in range(s.m):
            idx[:,b]=(np.cumsum(p[:,b:],1)/np.maximum(np.cumsum(t[:,b:],1),1e-12)).max(1)
        s.idx=idx.tolist()
        if s.hits.sum()+s.lost.sum()>8*s.W: s.hits*=.5; s.lost*=.5
