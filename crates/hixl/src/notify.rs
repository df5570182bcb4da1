//! Notifications.

use llm_datadist_core::Deadline;

use crate::inbox::Notice;
use crate::messages::Message;
use crate::open_engine::OpenEngine;
use crate::replies::Reply;
use crate::status::{Outcome, Status};

impl OpenEngine {
    /// Sends a notification, and returns when the engine of the peer has it.
    pub(crate) fn notify(&self, engine: &str, (name, text): (&str, &str), deadline: Deadline) -> Outcome<()> {
        if name.len() > Notice::MAX_TEXT || text.len() > Notice::MAX_TEXT {
            return Err(Status::ParamInvalid);
        }
        let connection = self.connections.find(engine, deadline)?.ok_or(Status::NotConnected)?;
        if connection.is_broken() {
            return Err(Status::Failed);
        }
        let sent = self.send_question(
            connection.peer,
            || !connection.has_ended(),
            deadline,
            |id| Message::Notify { id, name: name.to_owned(), text: text.to_owned() },
        )?;
        let asked = sent.map_or(Ok(Reply::Lost), |id| {
            self.replies.wait(id, deadline).inspect_err(|_| {
                // It comes after the notification, which is removed if the program of the peer has not read it.
                self.outbox.send(&self.engine, connection.peer, Message::Withdraw { id }.encode());
            })
        });
        match asked {
            Ok(Reply::Done(true)) => Ok(()),
            Ok(Reply::Done(false)) => Err(Status::ResourceExhausted),
            Ok(_) if connection.has_ended() => Err(Status::NotConnected),
            Ok(_) => Err(Status::Failed),
            Err(status) => Err(status),
        }
    }
}
