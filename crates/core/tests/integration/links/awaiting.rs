//! Awaiting transfers in async code: which tasks are woken, and what a dropped future leaves.

use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use llm_datadist_core::bindings::DataDist;
use llm_datadist_core::{ErrorKind, Event, Result, Transfer, TransferFuture, WhileRefused};

use super::fake_peer::Fake;
use super::{LONG, Way, config, eventually, open};

/// A task that counts how often it was woken.
#[derive(Default)]
struct Task(AtomicUsize);

impl Wake for Task {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

impl Task {
    fn poll(self: &Arc<Self>, future: Pin<&mut TransferFuture<'_>>) -> Poll<Result<()>> {
        future.poll(&mut Context::from_waker(&Waker::from(self.clone())))
    }

    fn woken(&self) -> usize {
        self.0.load(Ordering::SeqCst)
    }
}

/// An engine with a call that runs until the peer answers or the call is cancelled.
fn running() -> (DataDist, Fake, Arc<Transfer>) {
    let (engine, fake) = (open(config(1, Way::Tcp), Way::Tcp), Fake::new(2, 1));
    let call = engine.ensure_link(fake.address().remote[0], LONG, None, WhileRefused::Retry).unwrap();
    (engine, fake, call)
}

fn completed(engine: &DataDist) -> usize {
    let events = engine.poll(100).unwrap();
    events.iter().filter(|event| matches!(event, Event::Completed(_))).count()
}

#[test]
fn the_task_that_polled_last_is_woken_once() {
    let (engine, fake, call) = running();
    let [first, second, other] = [(); 3].map(|()| Arc::<Task>::default());
    let mut future = pin!(call.as_ref().into_future());
    let mut another = pin!(call.as_ref().into_future());
    for task in [&first, &first, &second] {
        assert!(task.poll(future.as_mut()).is_pending());
    }
    assert!(other.poll(another.as_mut()).is_pending());
    let _control = fake.linked();
    eventually("the end of the call", || second.woken() > 0 && other.woken() > 0);
    assert_eq!([first.woken(), second.woken(), other.woken()], [0, 1, 1]);
    assert_eq!(second.poll(future.as_mut()), Poll::Ready(Ok(())));
    assert_eq!(other.poll(another.as_mut()), Poll::Ready(Ok(())));
    assert_eq!(call.peer().unwrap().cluster.0, 2);
    assert_eq!(completed(&engine), 0, "the outcome was taken");
}

#[test]
fn a_failure_is_the_output() {
    let (_engine, _fake, call) = running();
    let task = Arc::<Task>::default();
    let mut future = pin!(call.as_ref().into_future());
    assert!(task.poll(future.as_mut()).is_pending());
    assert!(call.cancel());
    eventually("the end of the call", || task.woken() == 1);
    let Poll::Ready(Err(error)) = task.poll(future.as_mut()) else { panic!("the call has ended") };
    assert_eq!(error.kind(), ErrorKind::Cancelled, "{error}");
}

/// A task that panics when it is woken.
struct Panics;

impl Wake for Panics {
    fn wake(self: Arc<Self>) {
        panic!("injected");
    }
}

/// The panic reaches neither the other tasks nor the engine.
#[test]
fn a_task_that_panics_does_no_harm() {
    let (engine, fake, call) = running();
    let task = Arc::<Task>::default();
    let mut panics = pin!(call.as_ref().into_future());
    let mut future = pin!(call.as_ref().into_future());
    assert!(panics.as_mut().poll(&mut Context::from_waker(&Waker::from(Arc::new(Panics)))).is_pending());
    assert!(task.poll(future.as_mut()).is_pending());
    let _control = fake.linked();
    eventually("the end of the call", || task.woken() == 1);
    assert_eq!(task.poll(future.as_mut()), Poll::Ready(Ok(())));
    assert!(engine.drain(LONG).unwrap(), "the call has left those that run");
}

#[test]
fn a_dropped_future_leaves_the_transfer() {
    let (engine, fake, call) = running();
    let task = Arc::<Task>::default();
    for _ in 0..3 {
        let mut future = Box::pin(call.as_ref().into_future());
        assert!(task.poll(future.as_mut()).is_pending());
    }
    assert_eq!(Arc::strong_count(&task), 1, "the transfer has forgotten the task");
    let _control = fake.linked();
    eventually("the end of the call", || call.done());
    assert_eq!(task.woken(), 0);
    let mut ended = 0;
    eventually("the event", || {
        ended += completed(&engine);
        ended == 1
    });
    assert_eq!(task.poll(pin!(call.as_ref().into_future())), Poll::Ready(Ok(())), "the outcome stays");
}
