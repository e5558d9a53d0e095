//! The sockets that clients connect to.

use crate::failure::Failure;
use rustix::io::Errno;
use socket2::{Domain, Protocol, Socket, Type};
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use tokio::net::TcpListener;
use tracing::warn;

/// Connections that the kernel keeps until they are accepted. One more waits a second before it tries again, so this is
/// for all clients of a replica that come at once.
const MAX_PENDING_CONNECTIONS: i32 = 4096;

/// Listens, and says where. At `::` IPv4 is answered, too, and alone where the kernel knows no IPv6. Fails with what the
/// port is for where it cannot be had.
pub fn bind(address: SocketAddr, purpose: &str) -> Result<(TcpListener, SocketAddr), Failure> {
    let failed = |error| Failure::configuration(format!("cannot listen on {address} for {purpose}: {error}"));
    let listener = listen_where_it_can(address, listen).map_err(failed)?;
    let bound = listener.local_addr().map_err(failed)?;
    Ok((listener, bound))
}

/// `listen`, at every address of IPv4 instead of every one where there is no IPv6: a kernel without it knows no such
/// socket, and one that it is switched off in has no such address.
fn listen_where_it_can<T>(address: SocketAddr, listen: impl Fn(SocketAddr) -> io::Result<T>) -> io::Result<T> {
    let is_missing = |error: &io::Error| {
        [Errno::AFNOSUPPORT, Errno::ADDRNOTAVAIL].iter().any(|errno| error.raw_os_error() == Some(errno.raw_os_error()))
    };
    match listen(address) {
        Err(error) if address.ip() == Ipv6Addr::UNSPECIFIED && is_missing(&error) => {
            let instead = SocketAddr::from((Ipv4Addr::UNSPECIFIED, address.port()));
            warn!("there is no IPv6 here ({error}): listening on {instead} instead of {address}");
            listen(instead)
        }
        listened => listened,
    }
}

fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_nonblocking(true)?;
    if address.ip() == Ipv6Addr::UNSPECIFIED {
        // Whatever the kernel's default (`net.ipv6.bindv6only`).
        socket.set_only_v6(false)?;
    }
    // What is left of a predecessor's connections does not keep its port.
    socket.set_reuse_address(true)?;
    socket.bind(&address.into())?;
    socket.listen(MAX_PENDING_CONNECTIONS)?;
    TcpListener::from_std(socket.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpStream;

    #[tokio::test]
    async fn every_address_is_one_of_ipv4_too() {
        let (_listener, bound) = bind("[::]:0".parse().unwrap(), "a test").unwrap();
        assert!(TcpStream::connect((Ipv4Addr::LOCALHOST, bound.port())).is_ok(), "{bound}");
        // A machine without IPv6 is one that the next test is about.
        let has_ipv6 = std::net::TcpListener::bind((Ipv6Addr::LOCALHOST, 0)).is_ok();
        assert_eq!(TcpStream::connect((Ipv6Addr::LOCALHOST, bound.port())).is_ok(), has_ipv6, "{bound}");
    }

    #[test]
    fn without_ipv6_every_address_is_one_of_ipv4_and_no_other_is_changed() {
        let without = |errno: Errno| {
            move |address: SocketAddr| match address {
                SocketAddr::V4(_) => Ok(address),
                SocketAddr::V6(_) => Err(io::Error::from_raw_os_error(errno.raw_os_error())),
            }
        };
        for errno in [Errno::AFNOSUPPORT, Errno::ADDRNOTAVAIL] {
            let found = listen_where_it_can("[::]:8000".parse().unwrap(), without(errno));
            assert_eq!(found.unwrap(), "0.0.0.0:8000".parse().unwrap());
            assert!(listen_where_it_can("[::1]:8000".parse().unwrap(), without(errno)).is_err(), "{errno}");
        }
        assert!(listen_where_it_can("[::]:8000".parse().unwrap(), without(Errno::ADDRINUSE)).is_err());
    }
}
