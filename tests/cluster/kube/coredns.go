package main

import (
	"fmt"
	"os"

	"github.com/coredns/caddy"
	_ "github.com/coredns/coredns/core/dnsserver"
	_ "github.com/coredns/coredns/plugin/bind"
	_ "github.com/coredns/coredns/plugin/cache"
	_ "github.com/coredns/coredns/plugin/errors"
	_ "github.com/coredns/coredns/plugin/kubernetes"
)

// coredns serves the Corefile named by its only argument, with the plugins that a cluster's names need.
// CoreDNS's own main function would link every cloud's SDK for plugins that nothing here uses.
func coredns() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: coredns COREFILE")
		os.Exit(2)
	}
	contents, err := os.ReadFile(os.Args[1])
	exitOn(err)
	caddy.Quiet = true
	instance, err := caddy.Start(caddy.CaddyfileInput{Contents: contents, Filepath: os.Args[1], ServerTypeName: "dns"})
	exitOn(err)
	instance.Wait()
}

func exitOn(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
